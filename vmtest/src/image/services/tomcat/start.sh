base=/data/tomcat
mkdir -p $base/conf $base/logs $base/temp $base/work $base/webapps
cp /etc/dunlin/server.xml $base/conf/
cp /etc/dunlin/web.xml $base/conf/
java=$(ls -d /usr/lib/jvm/java-*-openjdk-amd64 | head -n 1)
home=/usr/share/tomcat10
exec "$java/bin/java" -Xmx96m -Xss512k -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto \
    -Djava.security.egd=file:/dev/urandom -Djava.awt.headless=true \
    -Dcatalina.home=$home -Dcatalina.base=$base -Djava.io.tmpdir=$base/temp \
    -cp $home/bin/bootstrap.jar:$home/bin/tomcat-juli.jar org.apache.catalina.startup.Bootstrap start
